"""Write docs/metrics.md from the registry of metrics: `python -m scripts.metrics_page`."""

from __future__ import annotations

from pathlib import Path

from miles_async.observability.metric_names import registry

PAGE = Path(__file__).resolve().parent.parent / "docs" / "metrics.md"


def page() -> str:
    """The text of the page."""
    found = registry()
    parts = ["# Metrics", found.introduction.strip()]
    for section in found.sections:
        rows = "\n".join(f"| {row.names} | {row.unit} | {row.meaning} | {row.worries} |" for row in section.rows)
        table = f"| metric | unit | meaning | worries when |\n|---|---|---|---|\n{rows}"
        parts += [
            part for part in (f"## {section.title}", section.before.strip(), table, section.after.strip()) if part
        ]
    return "\n\n".join(parts) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
