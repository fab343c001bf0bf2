"""Tests, and the helpers that they share: imported by their whole names, so that no two can collide."""
