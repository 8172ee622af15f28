"""Self-contained HTML pages in one style: reports, and the service's own page."""

from apportion.web.page import REPORT, WATCH, Page

__all__ = ["REPORT", "WATCH", "Page"]
