"""Files that show what became of a graph, and that the program itself runs (docs/dumps.md).

``graph_dump``  what is kept of one graph, and when
``folder``      the folder of this process: locked, bounded, harmless
``graph_text``  an annotated graph as text
``dot``         a plan as a picture
"""

from bcg_compiler.dump.graph_dump import GraphDump
from bcg_compiler.dump.graph_text import graph_text

__all__ = ["GraphDump", "graph_text"]
