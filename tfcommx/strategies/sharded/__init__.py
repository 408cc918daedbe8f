"""Sharded: each rank updates 1/p of the weights and keeps 1/p of the optimizer's state.

strategy      the options, the steps (push, update of the shard, pull), measured times of pulls
shards        which entries each rank updates
whole_shards  shards of whole variables, for LARS, LAMB, Adafactor and Muon
"""
