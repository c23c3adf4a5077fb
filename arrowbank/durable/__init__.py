"""The hot path: what makes a group durable and finds it again. ``layout`` tells the on-disk format."""
