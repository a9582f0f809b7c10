"""Compares the models here with measurements, and with the behaviour of other programs."""
