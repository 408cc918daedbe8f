"""Comparison of methods: the bytes and the time that each costs, and the score that it loses.

methods     a method: a name, and its changes of a recipe; methods.yaml has the shipped ones
trainings   trains a method with one seed, in a separate process; keeps one file for each training
step_times  the time of a step at a bandwidth: predicted from a profile of the recipe's model, or
            measured on hosts that have such links
rows        scores at equal steps, bytes and time; the Pareto set: pure functions of numbers
tables      tables and sentences on the terminal
figures     curves over time and over bytes

    recipe + methods + seeds -> trainings --scores, bytes, steps--+--> rows -> tables, figures
    recipe + methods -> step_times --seconds of a step------------+

No TensorFlow is loaded here, because trainings and profiles are separate processes.

To add a method: add a row to methods.yaml, or write a YAML file of the same form.
"""
