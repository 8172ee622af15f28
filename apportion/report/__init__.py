"""HTML reports of plans: self-contained files that open offline.

    Plan ──simulate──► content ──columns──► JSON ──page──► HTML with its style and script inside

`apportion/web` has the browser code and assembles the pages.
"""

from __future__ import annotations

from apportion.report.pages import compare_html, diff_html, report_html

__all__ = ["compare_html", "diff_html", "report_html"]
