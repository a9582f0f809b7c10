"""Fits the constants of step-time models to measurements: whole steps, and kernels."""
