// Servers and clients for Go's runtime. They speak the protocol of the bench's synthetic loads.
//
//	go_load serve echo|http|files ADDRESS
//	go_load load echo|http|files ADDRESS CONNECTIONS SECONDS
//
// Each connection has a goroutine and one pending request of 64 B. http answers with 1 KB, files
// with 64 KB.
package main

import (
	"encoding/json"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"sort"
	"strconv"
	"sync"
	"sync/atomic"
	"time"
)

const (
	size = 64
	warm = 300 * time.Millisecond
)

// The size of the answers over HTTP.
var pages = map[string]int{"http": 1 << 10, "files": 64 << 10}

func check(err error) {
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}

func echo(connection net.Conn) {
	defer connection.Close()
	message := make([]byte, size)
	for {
		if _, err := io.ReadFull(connection, message); err != nil {
			return
		}
		if _, err := connection.Write(message); err != nil {
			return
		}
	}
}

func serve(kind, address string) {
	listener, err := net.Listen("tcp", address)
	check(err)
	fmt.Println("ready", listener.Addr())
	if page, isHTTP := pages[kind]; isHTTP {
		body := make([]byte, page)
		answer := func(writer http.ResponseWriter, _ *http.Request) { writer.Write(body) }
		go http.Serve(listener, http.HandlerFunc(answer))
	} else {
		go func() {
			for {
				connection, err := listener.Accept()
				check(err)
				go echo(connection)
			}
		}()
	}
	io.Copy(io.Discard, os.Stdin)
}

// Returns a function that sends one request and reads its answer.
func requester(kind, address string, client *http.Client) func() {
	if page, isHTTP := pages[kind]; isHTTP {
		return func() {
			answer, err := client.Get("http://" + address + "/")
			check(err)
			count, err := io.Copy(io.Discard, answer.Body)
			check(err)
			if count != int64(page) {
				check(fmt.Errorf("%d bytes came", count))
			}
			answer.Body.Close()
		}
	}
	connection, err := net.Dial("tcp", address)
	check(err)
	message := make([]byte, size)
	return func() {
		_, err := connection.Write(message)
		check(err)
		_, err = io.ReadFull(connection, message)
		check(err)
	}
}

func load(kind, address string, connections int, limit time.Duration) {
	client := &http.Client{Transport: &http.Transport{MaxIdleConnsPerHost: connections, MaxConnsPerHost: connections}}
	var isMeasured, isOver atomic.Bool
	var all sync.WaitGroup
	times := make([][]time.Duration, connections)
	for index := range connections {
		request := requester(kind, address, client)
		all.Add(1)
		go func() {
			defer all.Done()
			for !isOver.Load() {
				measured, begin := isMeasured.Load(), time.Now()
				request()
				if measured && !isOver.Load() {
					times[index] = append(times[index], time.Since(begin))
				}
			}
		}()
	}
	time.Sleep(warm)
	fmt.Println("begin")
	begin := time.Now()
	isMeasured.Store(true)
	time.Sleep(limit)
	isOver.Store(true)
	seconds := time.Since(begin).Seconds()
	all.Wait()
	var every []time.Duration
	for _, some := range times {
		every = append(every, some...)
	}
	sort.Slice(every, func(one, other int) bool { return every[one] < every[other] })
	micros := func(share int) float64 {
		if len(every) == 0 {
			return 0
		}
		return float64(every[len(every)*share/100].Nanoseconds()) / 1000
	}
	check(json.NewEncoder(os.Stdout).Encode(map[string]any{
		"operations": len(every), "seconds": seconds, "p50_us": micros(50), "p99_us": micros(99),
	}))
	io.Copy(io.Discard, os.Stdin)
}

func main() {
	if os.Args[1] == "serve" {
		serve(os.Args[2], os.Args[3])
		return
	}
	connections, err := strconv.Atoi(os.Args[4])
	check(err)
	seconds, err := strconv.ParseFloat(os.Args[5], 64)
	check(err)
	load(os.Args[2], os.Args[3], connections, time.Duration(seconds*float64(time.Second)))
}
