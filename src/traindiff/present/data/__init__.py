"""Results for other programs: CSV, JSON, JUnit, Markdown, and the tools that plot scalars."""
