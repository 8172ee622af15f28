"""HTML pages that need nothing from elsewhere: reports, and the service's own page, in one look."""

from apportion.web.page import REPORT, WATCH, Page

__all__ = ["REPORT", "WATCH", "Page"]
