"""Observe MindSpore trainings. Users import it as `traindiff.mindspore`. Needs mindspore, and no torch."""
