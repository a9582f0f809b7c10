"""Settings: how files, environment and command line are read, and what a cluster's file contains."""
