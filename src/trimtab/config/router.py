"""The `router` section: whether routers are trained, and what balances the load of experts.

Knows: keys, defaults, which values contradict. Does not know: architectures, torch.
"""

from __future__ import annotations

from typing import Literal

from pydantic import model_validator

from trimtab.config.fields import Positive, Section, fault


class RouterSection(Section):
    """Training of the routers; frozen ones keep choosing by the base's rule.

    Trained routers are saved whole beside the adapter. Inference engines load adapters only, so merge
    before serving.

    Attributes:
        train: `frozen`; `full` trains the matrices by gradient; `bias` only moves the biases that
            experts are selected with.
        balance: `quantile` sets those biases after every step so that the step's tokens would have
            spread evenly (Quantile Balancing); `aux` adds a load-balancing loss per sequence to that of
            the data; `none` does nothing.
        aux_loss_coef: weight of that loss in every routed layer; it is 1 where the load is even.
    """

    train: Literal["frozen", "bias", "full"] = "frozen"
    balance: Literal["none", "quantile", "aux"] = "none"
    aux_loss_coef: Positive = 1e-4

    @model_validator(mode="after")
    def _fits(self) -> RouterSection:
        if self.balance == "aux" and self.train != "full":
            raise fault("TT105", "balance", f"an auxiliary loss trains routers, and `train` is "
                        f"{self.train}", "set train: full, or leave balance out")
        if self.balance == "quantile" and self.train == "frozen":
            raise fault("TT105", "balance", "Quantile Balancing moves selection biases, and `train` is "
                        "frozen", "set train: bias or full, or leave balance out")
        if self.train == "bias" and self.balance != "quantile":
            raise fault("TT105", "train", "biases are moved by Quantile Balancing only",
                        "set balance: quantile, or train: frozen")
        return self
