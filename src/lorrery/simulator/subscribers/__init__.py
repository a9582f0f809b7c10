"""What is made of a simulation while it runs: gaps between tokens, steps, traces, frames, scrapes."""
