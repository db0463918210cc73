"""How a load went over time: whether it was sustained, and its steady part."""
