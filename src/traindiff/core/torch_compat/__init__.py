"""Every private name of torch that traindiff uses, each with the reason; a test finds those that are elsewhere."""

from __future__ import annotations
