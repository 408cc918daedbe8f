"""Sharded: each rank updates 1/p of the weights and keeps 1/p of the optimizer's state.

strategy      the options, and the measured times of pulls
run           the steps: push, update of the shard, pull
shards        which entries each rank updates
whole_shards  shards of whole variables, for LARS, LAMB, Adafactor and Muon
"""
