"""The preview of a recipe's data as one HTML page.

Knows: what `preview` found, the template. Does not know: how it was found.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from markupsafe import Markup

from trimtab.config.data import DataSection
from trimtab.data.preview import PackSummary, Run, SourceSummary
from trimtab.report.charts import Bar, bar_chart
from trimtab.report.page import render

_MOST_BARS = 12
ROLES = ("system", "user", "tool", "assistant", "text", "template", "image")


@dataclass(frozen=True, slots=True)
class _Shown:
    """One record: where it stands and its runs, with what is said above them."""

    where: str
    runs: Sequence[Run]

    @property
    def num_tokens(self) -> int:
        """Tokens of all runs."""
        return sum(run.num_tokens for run in self.runs)

    @property
    def num_supervised(self) -> int:
        """Tokens in the loss."""
        return sum(run.num_tokens for run in self.runs if run.supervised)

    @property
    def num_images(self) -> int:
        """Images."""
        return sum(run.image is not None for run in self.runs)


def preview_page(
    recipe_path: str,
    data: DataSection,
    shown: Mapping[str, Sequence[tuple[str, Sequence[Run]]]],
    totals: Mapping[str, SourceSummary],
    packs: PackSummary,
) -> str:
    """Fill the page; it needs nothing beside itself.

    Args:
        recipe_path: as the user named it.
        data: the recipe's data section.
        shown: by source, some records as (where, runs).
        totals: by source.
        packs: of the first packs.
    """
    images = {name: total for name, total in totals.items() if total.images}
    tokens = sum(total.tokens for total in totals.values())
    return render(
        "trimtab.data",
        "preview.html.j2",
        {
            "recipe": recipe_path,
            "data": data,
            "records": {
                name: [_Shown(where, runs) for where, runs in items]
                for name, items in shown.items()
            },
            "totals": totals,
            "packs": packs,
            "roles": ROLES,
            "num_images": sum(total.images for total in images.values()),
            "image_share": sum(t.image_tokens for t in images.values()) / max(1, tokens),
            "charts": {name: _sizes_chart(name, total.image_sizes) for name, total in images.items()},
        },
    )


def _sizes_chart(name: str, sizes: Mapping[int, int]) -> Markup:
    """Images by tokens they take; many sizes share bars of equal width."""
    low, high = min(sizes), max(sizes)
    if len(sizes) <= _MOST_BARS:
        counted = [(f"{size:,}", sizes[size]) for size in sorted(sizes)]
    else:
        step = -(-(high - low + 1) // _MOST_BARS)
        counted = [
            (f"{begin:,} to {begin + step - 1:,}",
             sum(n for size, n in sizes.items() if begin <= size < begin + step))
            for begin in range(low, high + 1, step)
        ]  # fmt: skip
    bars = [Bar(label, count, f"{count:,}") for label, count in counted]
    return bar_chart(f"{name}: number of images by tokens they take", bars)
