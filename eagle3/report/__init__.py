"""The report: one self-contained HTML file out of what the stages wrote."""
