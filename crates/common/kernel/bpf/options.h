// SPDX-License-Identifier: Apache-2.0 OR GPL-2.0-only
//
// The options that an untrusted program may set on a socket of the host's network.

// The kernel's values on all architectures with BPF except one.
#define SOL_SOCKET 1
#define IPPROTO_IP 0
#define IPPROTO_TCP 6
#define IPPROTO_IPV6 41

// Returns true for options that affect only this connection's buffers, timers and segments, or
// nothing. All others are refused, except those that `is_kept` names.
static __always_inline int may_set(int level, int option)
{
	if (level == SOL_SOCKET)
		switch (option) {
		case 2:  // SO_REUSEADDR
		case 6:  // SO_BROADCAST
		case 7:  // SO_SNDBUF
		case 8:  // SO_RCVBUF
		case 9:  // SO_KEEPALIVE
		case 10: // SO_OOBINLINE
		case 13: // SO_LINGER
		case 18: // SO_RCVLOWAT
		case 19: // SO_SNDLOWAT, which no socket supports
		case 20: // SO_RCVTIMEO, old
		case 21: // SO_SNDTIMEO, old
		case 29: // SO_TIMESTAMP, old
		case 35: // SO_TIMESTAMPNS, old
		case 63: // SO_TIMESTAMP
		case 64: // SO_TIMESTAMPNS
		case 66: // SO_RCVTIMEO
		case 67: // SO_SNDTIMEO
			return 1;
		}
	if (level == IPPROTO_TCP)
		switch (option) {
		case 1:  // TCP_NODELAY
		case 2:  // TCP_MAXSEG
		case 3:  // TCP_CORK
		case 4:  // TCP_KEEPIDLE
		case 5:  // TCP_KEEPINTVL
		case 6:  // TCP_KEEPCNT
		case 7:  // TCP_SYNCNT
		case 8:  // TCP_LINGER2
		case 9:  // TCP_DEFER_ACCEPT
		case 10: // TCP_WINDOW_CLAMP
		case 12: // TCP_QUICKACK
		case 13: // TCP_CONGESTION
		case 16: // TCP_THIN_LINEAR_TIMEOUTS
		case 17: // TCP_THIN_DUPACK
		case 18: // TCP_USER_TIMEOUT
		case 25: // TCP_NOTSENT_LOWAT
		case 36: // TCP_INQ
			return 1;
		}
	// Erlang copies these options from the listening socket to each accepted one.
	if (level == IPPROTO_IP)
		switch (option) {
		case 12: // IP_RECVTTL
		case 13: // IP_RECVTOS
		case 24: // IP_BIND_ADDRESS_NO_PORT
			return 1;
		}
	if (level == IPPROTO_IPV6)
		switch (option) {
		case 51: // IPV6_RECVHOPLIMIT
		case 66: // IPV6_RECVTCLASS
			return 1;
		}
	return 0;
}

// Returns true for options that are accepted without any effect on packets, which belong to the
// host's network. getsockopt reports some of the accepted values.
static __always_inline int is_kept(int level, int option)
{
	if (level == SOL_SOCKET)
		return option == 12; // SO_PRIORITY
	if (level == IPPROTO_IP)
		switch (option) {
		case 1:  // IP_TOS
		case 2:  // IP_TTL
		case 10: // IP_MTU_DISCOVER
		case 11: // IP_RECVERR
		case 21: // IP_MINTTL
			return 1;
		}
	if (level == IPPROTO_IPV6)
		switch (option) {
		case 16: // IPV6_UNICAST_HOPS
		case 23: // IPV6_MTU_DISCOVER
		case 25: // IPV6_RECVERR
		case 67: // IPV6_TCLASS
		case 73: // IPV6_MINHOPCOUNT
			return 1;
		}
	return 0;
}
