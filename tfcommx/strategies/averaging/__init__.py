"""Weight averaging: local updates, and every few steps an average of the weights.

strategy         the options, the steps, and rounds that overlap with steps
outer_optimizer  moves the start weights of a round
"""
