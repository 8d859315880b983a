"""Puts sections into the page. The template is the only file that holds markup and style."""

from __future__ import annotations

from pathlib import Path

from pydantic import Field

from eagle3.report.data import ReportData
from eagle3.report.result import headline, result
from eagle3.report.sections import SECTIONS
from eagle3.settings import Settings

TEMPLATE = "page.html.j2"


class ReportSettings(Settings):
    """title: at the top of the page."""

    title: str = Field(default="EAGLE-3 drafters compared", min_length=1)


def render(data: ReportData, settings: ReportSettings) -> str:
    """The report as one HTML document that needs nothing from outside."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    found = [section for make in SECTIONS if (section := make(data)) is not None]
    return environment.get_template(TEMPLATE).render(
        title=settings.title, headline=headline(data), result=result(data), sections=found
    )
