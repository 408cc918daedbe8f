"""Comparison of methods: what each costs in bytes and in time, and what it loses.

methods     a method: a name, and what it changes in a recipe; methods.yaml has the shipped ones
trainings   trains a method with one seed, in processes of its own; keeps one file for each training
step_times  what a step takes at a bandwidth, predicted from a profile of the recipe's model
measured    the same, measured on hosts that have such links
outcomes    scores at equal steps, bytes and time; the Pareto set: pure functions of numbers
tables      tables and sentences on the terminal
figures     curves over time and over bytes

    recipe + methods + seeds -> trainings --scores, bytes, steps--+--> outcomes -> tables, figures
    recipe + methods -> step_times --seconds of a step------------+

Here no TensorFlow is loaded: trainings and profiles are processes of their own.

To add a method: add a row to methods.yaml, or write a file of the same form for yourself.
"""
