# An echo server in Perl: echo.pl select|anyevent PORT

use strict;
use warnings;
use IO::Select;
use IO::Socket::INET;

$SIG{PIPE} = 'IGNORE';

# One process, which waits in IO::Select for all of them.
sub serve_by_select {
    my ($port) = @_;
    my $listener = IO::Socket::INET->new(LocalAddr => '127.0.0.1', LocalPort => $port, Listen => 64, ReuseAddr => 1) or die $!;
    my ($readers, $writers, %waiting) = (IO::Select->new($listener), IO::Select->new);
    while (1) {
        my ($readable, $writable) = IO::Select->select($readers, $writers, undef);
        for my $stream (@$readable) {
            if ($stream == $listener) {
                my $accepted = $listener->accept or die $!;
                $accepted->blocking(0);
                $readers->add($accepted);
                next;
            }
            my $count = sysread $stream, $waiting{$stream}, 65536, length($waiting{$stream} // '');
            next if !defined $count && $!{EAGAIN};
            if ($count) {
                $writers->add($stream);
            } else {
                $_->remove($stream) for $readers, $writers;
                delete $waiting{$stream};
                close $stream;
            }
        }
        for my $stream (@$writable) {
            next unless exists $waiting{$stream};
            my $count = syswrite $stream, $waiting{$stream};
            next unless defined $count;
            substr $waiting{$stream}, 0, $count, '';
            $writers->remove($stream) if $waiting{$stream} eq '';
        }
    }
}

# EV's loop, which is libev: epoll_ctl put off until just before it waits.
sub serve_by_anyevent {
    my ($port) = @_;
    require EV;
    require AnyEvent;
    require AnyEvent::Handle;
    require AnyEvent::Socket;
    my %handles;
    AnyEvent::Socket::tcp_server('127.0.0.1', $port, sub {
        my ($stream) = @_;
        my $handle;
        my $forget = sub { delete $handles{$handle}; $handle->destroy };
        $handle = AnyEvent::Handle->new(
            fh => $stream,
            on_read => sub { $_[0]->push_write($_[0]{rbuf}); $_[0]{rbuf} = '' },
            on_eof => $forget,
            on_error => $forget,
        );
        $handles{$handle} = $handle;
    });
    EV::run();
}

my ($style, $port) = @ARGV;
{ select => \&serve_by_select, anyevent => \&serve_by_anyevent }->{$style}->($port);
