"""What verdicts are made of: findings, and how they read."""

from traindiff.findings.finding import Finding

__all__ = ["Finding"]
