"""Missing and waiting ranks: detected, named, ended (law 7, "no hang").

liveness    start the watch of this rank; end the rank at an alarm
watcher     the watch's process, one beside each rank: sockets and clock
protocol    what a watcher says and decides, without sockets: tree, alarm, messages
membership  which ranks have left while the others continue
progress    what this rank is doing
stalls      who waits for whom, from the progress of all ranks
"""
