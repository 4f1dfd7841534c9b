"""Products of few rows with stacked weights, in Mosaic GPU."""
