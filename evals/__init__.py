"""Grading, evaluation tasks and their statistics."""
