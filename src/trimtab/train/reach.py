"""Which adapters the data has reached: a gradient that is missing is an error or a matter of time.

Knows: gradients by name, tokens per expert. Does not know: recipes, why data does not arrive.

Tokens reach every module of the text model in the first step. An expert waits for tokens that
are routed to it, the projector for an image; they are listed until they were reached and are a
warning after `check_steps`. Of a tensor with an expert axis the slices count one by one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from torch import Tensor
from torch.nn import Parameter

from trimtab.arch.adapter import LoRATarget
from trimtab.errors import AdapterError

_NAMED = 5


class Reach:
    """Watches the gradients of the first steps.

    Args:
        parameters: trainable tensors by name.
        targets: where each adapter belongs.
        check_steps: steps after which what has not been reached is a warning.
        resumed: the adapter was trained before, so that a B off zero has been reached.
    """

    def __init__(
        self, parameters: Mapping[str, Parameter], targets: Sequence[LoRATarget], *,
        check_steps: int, resumed: bool,
    ) -> None:
        expert_names = {t.fqn for t in targets if t.owner == "routed_expert"}
        self._check_steps = check_steps
        self._waiting = {
            name: parameter for name, parameter in parameters.items()
            if not name.endswith(".lora.A") and parameter.requires_grad
        }
        self._experts: dict[str, set[int]] = {}
        for name, parameter in self._waiting.items():
            if name.partition(".lora.")[0] in expert_names and parameter.dim() > 2:
                self._experts[name] = set(range(parameter.shape[0]))
        self._told = False
        if resumed:
            self._drop(lambda p: p.detach())

    @property
    def waiting(self) -> list[str]:
        """Tensors, or experts of one, that nothing has reached yet."""
        found = []
        for name in self._waiting:
            experts = sorted(self._experts.get(name, ()))
            if name not in self._experts:
                found.append(name)
            elif experts:
                shown = ", ".join(str(e) for e in experts[:_NAMED])
                more = f" and {len(experts) - _NAMED} more" if len(experts) > _NAMED else ""
                found.append(f"{name} (experts {shown}{more})")
        return found

    def after_step(self, step: int, *, saw_images: bool) -> list[str]:
        """Look at the gradients of one step.

        Args:
            step: number of the step, from 0.
            saw_images: the step had an image.

        Returns:
            Lines to say: after the first step what is not reached yet, after `check_steps` a
            warning.

        Raises:
            AdapterError: TT504, a module that tokens reached got no gradient at all.
        """
        self._drop(lambda p: p.grad)
        silent = [name for name in self._waiting if self._must_have_gradient(name, saw_images)]
        if silent:
            raise AdapterError(
                "TT504", silent[0], f"{len(silent)} adapters were reached by tokens and got no "
                f"gradient: {', '.join(silent[:_NAMED])}",
            )
        waiting = self.waiting
        if waiting and not self._told:
            self._told = True
            return [f"not yet reached: {'; '.join(waiting[:_NAMED])}{_more(waiting)}"]
        if waiting and step + 1 == self._check_steps:
            return [f"warning: {len(waiting)} targets not reached after {step + 1} steps, they keep "
                    f"their start values: {'; '.join(waiting[:_NAMED])}{_more(waiting)}"]
        return []

    def _must_have_gradient(self, name: str, saw_images: bool) -> bool:
        if name.startswith("projector."):
            return saw_images
        if name in self._experts:  # some expert of a layer gets tokens in every step
            return len(self._experts[name]) == self._waiting[name].shape[0]
        return True

    def _drop(self, values: Callable[[Parameter], Tensor | None]) -> None:
        for name in list(self._waiting):
            value = values(self._waiting[name])
            if value is None:
                continue
            if name in self._experts:
                moved = value.flatten(1).any(1).nonzero().flatten().tolist()
                self._experts[name] -= set(moved)
                done = not self._experts[name]
            else:
                done = bool(value.any())
            if done:
                del self._waiting[name]


def _more(names: Sequence[str]) -> str:
    return f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
