"""Trainers of other libraries, with a bank. Each module needs its library; nothing else of arrowbank imports them."""
