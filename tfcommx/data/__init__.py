"""Input: the cache and the sources it reads."""
