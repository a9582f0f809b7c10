"""Pictures of what people see, made from what is shipped: `make screenshots` writes them to docs/figures."""
