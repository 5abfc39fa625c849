"""Pages for people: charts as SVG and HTML that needs no network.

Knows: axes, lines, bars, heat maps, the look of a page. Does not know: what the numbers mean; no
other package of Trimtab.
"""
