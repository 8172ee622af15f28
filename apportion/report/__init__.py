"""Pages that show plans: one HTML file each, which needs nothing else and opens offline.

    Plan ──simulate──► content ──columns──► JSON ──page──► HTML with its style and script inside

What the browser runs is in `apportion/web`, which puts pages together.
"""

from __future__ import annotations

from apportion.report.pages import compare_html, diff_html, report_html

__all__ = ["compare_html", "diff_html", "report_html"]
