"""Checking a bank without touching it, and mending one: ``verify`` and ``repair``."""
