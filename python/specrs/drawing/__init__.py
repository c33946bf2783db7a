"""Pictures of a request's pages and of a round's tree: in the terminal, and as SVG or PNG.

`row_cells` says what each slot of a request's row holds, `TreePicture` what each node of a tree is, and `fault_story`
what a historical fault does to the arrays of its smallest configuration; `terminal` and `figure` draw the three.
"""

from specrs.drawing.faults import Story, fault_story
from specrs.drawing.model import Cell, Kind, Strip, TreePicture, folded_pages, row_cells

__all__ = ["Cell", "Kind", "Story", "Strip", "TreePicture", "fault_story", "folded_pages", "row_cells"]
