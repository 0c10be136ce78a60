// SPDX-License-Identifier: Apache-2.0 OR GPL-2.0-only
//
// Which options can be set on a socket of the host's that a stranger holds.

// The kernel's, on every architecture that it has BPF for but one.
#define SOL_SOCKET 1
#define IPPROTO_IP 0
#define IPPROTO_TCP 6
#define IPPROTO_IPV6 41

// What can be set: it concerns this connection's own buffers, timers and segments. Whatever is not here is refused.
static __always_inline int may_set(int level, int option)
{
	if (level == SOL_SOCKET)
		switch (option) {
		case 2:  // SO_REUSEADDR
		case 7:  // SO_SNDBUF
		case 8:  // SO_RCVBUF
		case 9:  // SO_KEEPALIVE
		case 10: // SO_OOBINLINE
		case 13: // SO_LINGER
		case 18: // SO_RCVLOWAT
		case 20: // SO_RCVTIMEO, of old
		case 21: // SO_SNDTIMEO, of old
		case 29: // SO_TIMESTAMP, of old
		case 35: // SO_TIMESTAMPNS, of old
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
		case 8:  // TCP_LINGER2
		case 9:  // TCP_DEFER_ACCEPT
		case 10: // TCP_WINDOW_CLAMP
		case 12: // TCP_QUICKACK
		case 13: // TCP_CONGESTION
		case 18: // TCP_USER_TIMEOUT
		case 25: // TCP_NOTSENT_LOWAT
		case 36: // TCP_INQ
			return 1;
		}
	return 0;
}
