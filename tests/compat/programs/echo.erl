%% Echo servers and a client in Erlang, whose run-time makes its poll sets and then forks:
%%     escript echo.erl server active|once|passive PORT
%%     escript echo.erl client PORT CONNECTIONS MESSAGES GATE
%% The client repeats its messages until there is a file of the last name.
-mode(compile).

main(["server", Style, Port]) ->
    Active = case Style of "active" -> true; "once" -> once; "passive" -> false end,
    Options = [binary, {ip, {127, 0, 0, 1}}, {reuseaddr, true}, {backlog, 64}, {nodelay, true}, {active, false}],
    {ok, Listener} = gen_tcp:listen(list_to_integer(Port), Options),
    accept(Listener, Active);
main(["client", Port, Connections, Messages, Gate]) ->
    Self = self(),
    Ask = fun(Number) -> Self ! {Number, ask(list_to_integer(Port), Number, list_to_integer(Messages), Gate)} end,
    Numbers = lists:seq(1, list_to_integer(Connections)),
    [spawn_link(fun() -> Ask(Number) end) || Number <- Numbers],
    Digests = [receive {Number, Digest} -> Digest end || Number <- Numbers],
    io:format("~s~n", [binary:encode_hex(erlang:md5(Digests))]).

accept(Listener, Active) ->
    {ok, Socket} = gen_tcp:accept(Listener),
    Server = spawn(fun() -> receive go -> ok end, inet:setopts(Socket, [{active, Active}]), echo(Socket, Active) end),
    ok = gen_tcp:controlling_process(Socket, Server),
    Server ! go,
    accept(Listener, Active).

echo(Socket, false) ->
    case gen_tcp:recv(Socket, 0) of
        {ok, Data} -> gen_tcp:send(Socket, Data), echo(Socket, false);
        {error, _} -> gen_tcp:close(Socket)
    end;
echo(Socket, Active) ->
    receive
        {tcp, Socket, Data} ->
            gen_tcp:send(Socket, Data),
            Active =:= once andalso inet:setopts(Socket, [{active, once}]),
            echo(Socket, Active);
        {tcp_closed, Socket} -> ok;
        {tcp_error, Socket, _} -> gen_tcp:close(Socket)
    end.

ask(Port, Number, Messages, Gate) ->
    {ok, Socket} = gen_tcp:connect({127, 0, 0, 1}, Port, [binary, {active, false}, {nodelay, true}]),
    Digest = turns(Socket, Number, Messages, Gate),
    gen_tcp:close(Socket),
    Digest.

turns(Socket, Number, Messages, Gate) ->
    Ask = fun(Turn, Digest) ->
        Message = binary:copy(<<Number:32, Turn:32, "some bytes">>, 1 + Turn * 7 rem 97),
        ok = gen_tcp:send(Socket, Message),
        {ok, Message} = gen_tcp:recv(Socket, byte_size(Message), 10000),
        erlang:md5([Digest, Message])
    end,
    Digest = lists:foldl(Ask, <<>>, lists:seq(1, Messages)),
    case filelib:is_file(Gate) of
        true -> Digest;
        false -> turns(Socket, Number, Messages, Gate)
    end.
