"""Replace one section of a YAML document and leave the rest as it stands, comments included.

Knows: YAML. Does not know: which sections there are.
"""

from __future__ import annotations

import yaml

from trimtab.errors import ConfigError


def replace_section(text: str, key: str, section: str) -> str:
    """Put a section in place of the top-level `key`, or at the end where there is none.

    Args:
        text: the document, a mapping in block style.
        key: of the section.
        section: `key:` and its content.

    Raises:
        ConfigError: the whole document is in flow style, `{...}`.

    >>> replace_section("a: 1  # one\\nb: {x: 1}\\nc: 3\\n", "b", "b:\\n  x: 2\\n")
    'a: 1  # one\\nb:\\n  x: 2\\nc: 3\\n'
    >>> replace_section("a: 1", "b", "b: 2\\n")
    'a: 1\\nb: 2\\n'
    """
    root = yaml.compose(text)
    if isinstance(root, yaml.MappingNode) and root.flow_style and root.value:
        raise ConfigError("TT106", key, "cannot be written into a document that is one `{...}`",
                          hint="give each top-level key a line of its own")
    lines = text.splitlines(keepends=True)
    if lines and not lines[-1].endswith("\n"):
        lines[-1] += "\n"
    pairs = root.value if isinstance(root, yaml.MappingNode) else []
    for name, value in pairs:
        if name.value == key:
            first, last = name.start_mark.line, _last_line(value)
            return "".join([*lines[:first], section, *lines[last + 1 :]])
    return "".join([*lines, section])


def _last_line(node: yaml.Node) -> int:
    """The last line with content of a node; a block's own end stands at the next key."""
    if isinstance(node, yaml.MappingNode) and not node.flow_style and node.value:
        return _last_line(node.value[-1][1])
    if isinstance(node, yaml.SequenceNode) and not node.flow_style and node.value:
        return _last_line(node.value[-1])
    end: int = node.end_mark.line
    block = isinstance(node, yaml.ScalarNode) and node.style in ("|", ">")
    return end - 1 if block else end
