"""One self-contained HTML file about what a model compiles to.

``content``  plans → the data of the page; ``layers`` the steps by the layers of the model
``changes``  what passes changed, as differences of texts
``page``     HTML, style and script as they are; ``write`` puts them and the data together
"""

from bcg_compiler.debug.report.changes import PassDiff, read_passes
from bcg_compiler.debug.report.content import Report
from bcg_compiler.debug.report.write import ReportError, check_report, page, write_report

__all__ = ["PassDiff", "Report", "ReportError", "check_report", "page", "read_passes", "write_report"]
