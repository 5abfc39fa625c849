"""HTML pages from templates: one file each, style and charts inside, nothing loaded from outside.

Knows: where templates are. Does not know: what a page says.
"""

from __future__ import annotations

from jinja2 import ChoiceLoader, Environment, PackageLoader, StrictUndefined


def render(package: str, template: str, context: dict[str, object]) -> str:
    """Fill a template of `package`, which may extend `base.html.j2` of this one.

    Text is escaped; only `markupsafe.Markup` goes in as it is.

    Args:
        package: Python package with a folder `templates`.
        template: file name there.
        context: names the template uses; one that is missing is an error.
    """
    loaders = [PackageLoader(package), PackageLoader("trimtab.report")]
    environment = Environment(
        loader=ChoiceLoader(loaders), autoescape=True, undefined=StrictUndefined,
        trim_blocks=True, lstrip_blocks=True,
    )
    return environment.get_template(template).render(context)
