"""Detect missing and waiting ranks, name them, and end the others (law 7, "no hang").

liveness    start the watch of this rank; end the rank at an alarm
watcher     the watch's process, one for each rank: sockets and clock
protocol    messages and decisions of a watcher, without sockets: tree, alarm
membership  which ranks have left while the others continue
progress    the activity of this rank
stalls      waits of ranks for each other, from the progress of all ranks
"""
