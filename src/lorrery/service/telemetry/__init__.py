"""What a process tells of itself: logs, metrics under our names and other engines', traces."""
