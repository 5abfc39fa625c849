"""Building blocks of the recipe's sections: frozen models, number types and our own faults.

Knows: pydantic. Does not know: which keys there are.
"""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field
from pydantic_core import PydanticCustomError


def fault(
    code: str, key: str, rule: str, hint: str = "", *, secret: bool = False
) -> PydanticCustomError:
    """A fault of `key` (dotted, below the section that raises) with one of our codes.

    A value that may be secret is not repeated in the message.
    """
    context = {"code": code, "key": key, "rule": rule, "hint": hint, "secret": secret}
    return PydanticCustomError("trimtab", "{rule}", context)


def no_bool(value: object) -> object:
    """YAML reads `yes` and `on` as true, which Python would take for the number 1."""
    if isinstance(value, bool):
        raise fault("TT102", "", "must be a number, not true or false")
    return value


def not_yet(key: str, value: object, allowed: object) -> None:
    """Refuse any value but the one that works so far."""
    if value != allowed:
        raise fault("TT102", key, "is not supported yet", f"leave it at {allowed}")


PositiveInt = Annotated[int, Field(strict=True, ge=1)]
Number = Annotated[float, BeforeValidator(no_bool), Field(allow_inf_nan=False)]
Positive = Annotated[float, BeforeValidator(no_bool), Field(gt=0, allow_inf_nan=False)]
Share = Annotated[float, BeforeValidator(no_bool), Field(ge=0, le=1)]
Word = Annotated[str, Field(min_length=1)]


class Section(BaseModel):
    """A part of the recipe: unknown keys are faults, values cannot change."""

    model_config = ConfigDict(extra="forbid", frozen=True, serialize_by_alias=True)
