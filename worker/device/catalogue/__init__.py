"""GPUs, models and deployments by name, and the records that a step-time model sees."""
