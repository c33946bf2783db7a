"""Pictures of a request's pages and of a round's tree: in the terminal, and as SVG or PNG.

`row_cells` says what each slot of a request's row holds and `TreePicture` what each node of a tree is; `terminal` and
`figure` draw the two.
"""

from specrs.drawing.model import Cell, Kind, TreePicture, folded_pages, row_cells

__all__ = ["Cell", "Kind", "TreePicture", "folded_pages", "row_cells"]
