"""Speed and memory measurements behind ``rco bench``."""
