"""When: from what a user asks for to what is done bucket by bucket."""
