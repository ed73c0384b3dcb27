"""Speed of the collectors, as ratios measured in one run. See README.md."""
