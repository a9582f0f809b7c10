"""The virtual clock over the pure rooms."""
