"""One file, one searcher: the methods that RCO is compared with, all through the same seam."""
