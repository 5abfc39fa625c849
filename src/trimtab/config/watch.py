"""Sections on watching and saving a run: validation, router drift, checkpoints, trackers.

Knows: keys, defaults, ranges. Does not know: files, torch.
"""

from __future__ import annotations

from typing import Annotated, Literal
from urllib.parse import urlsplit

from pydantic import BeforeValidator, Field, field_validator, model_validator

from trimtab.config.fields import Positive, PositiveInt, Section, Word, fault, no_bool

Tracker = Literal["jsonl", "tensorboard", "mlflow"]
HeldOut = Annotated[float, BeforeValidator(no_bool), Field(ge=0, le=0.5)]


class ValidateSection(Section):
    """Validation during the run, on records that are then not trained on.

    A record is held out by the hash of its content, so that copies of it fall on the same side
    and the choice does not depend on its place in a file.

    Attributes:
        every_steps: steps between two validations; none where left out.
        domain_holdout: share of the domain records held out.
        general_holdout: share of the general records held out.
        max_tokens: most tokens of each of the two sets that a validation reads.
        keep_best: the adapter with the lowest domain loss is kept beside the last.
        stop_after: validations without a lower domain loss after which the run ends.
    """

    every_steps: PositiveInt | None = None
    domain_holdout: HeldOut = 0.02
    general_holdout: HeldOut = 0.02
    max_tokens: PositiveInt = 65536
    keep_best: bool = True
    stop_after: PositiveInt | None = None

    @model_validator(mode="after")
    def _has_a_measure(self) -> ValidateSection:
        if self.every_steps is not None and self.domain_holdout == 0:
            raise fault("TT105", "domain_holdout", "is 0, so that nothing is left to validate on",
                        "set it to 0.02 or so, or leave every_steps out")
        if self.stop_after is not None and self.every_steps is None:
            raise fault("TT105", "stop_after", "counts validations, and there are none",
                        "set every_steps")
        return self


class DriftSection(Section):
    """How far the adapter moves the routing of tokens away from the base's.

    Attributes:
        every_steps: steps between two measurements; with every saved state where left out.
        tokens: tokens of the fixed probe.
        alert: mean KL divergence of a layer, in nats, above which the run warns.
    """

    every_steps: PositiveInt | None = None
    tokens: PositiveInt = 256
    alert: Positive = 0.1


class CheckpointSection(Section):
    """Saved training states.

    Attributes:
        every_steps: steps between two saved states.
        keep: how many states stay on disk, and at the mirror.
        mirror: URL of a directory that finished states are copied to in the background.
            Credentials come from the environment and stand in no URL.
    """

    every_steps: PositiveInt = 50
    keep: PositiveInt = 2
    mirror: Word | None = None

    @field_validator("mirror")
    @classmethod
    def _names_no_secret(cls, value: str | None) -> str | None:
        if value is None:
            return None
        found = urlsplit(value)
        if not found.scheme:
            raise fault("TT102", "", "must be a URL such as s3://bucket/directory")
        if found.username or found.password or found.query:
            raise fault("TT102", "", "must hold no user, password or query: the recipe is copied "
                        "into the run directory", "give credentials through the environment", secret=True)
        return value
