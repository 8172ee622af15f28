"""Self-contained HTML pages, reports and the service's own page, in one style."""

from apportion.web.page import REPORT, WATCH, Page

__all__ = ["REPORT", "WATCH", "Page"]
