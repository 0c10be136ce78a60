// A server and a client of net/http without cgo: a static program with inline system calls.
//
//	web serve PORT
//	web ask PORT CLIENTS REQUESTS GATE
//
// Bodies are of all sizes, with and without a length, and requests use kept connections and new
// ones. Garbage is collected all the time, so goroutines are preempted by signals. The client
// repeats its requests until the file GATE exists.
package main

import (
	"bytes"
	"crypto/sha256"
	"fmt"
	"io"
	"net/http"
	"os"
	"runtime"
	"runtime/debug"
	"sort"
	"strconv"
	"time"
)

const patience = 20 * time.Second

func check(err error) {
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}

func number(word string) int {
	number, err := strconv.Atoi(word)
	check(err)
	return number
}

// Returns the bytes for a seed and a length.
func content(seed, length int) []byte {
	bytes := make([]byte, length)
	state := uint32(seed)*2654435761 + 1
	for index := range bytes {
		state = state*1664525 + 1013904223
		bytes[index] = byte(state >> 24)
	}
	return bytes
}

// Answers with the checksum of the request's body, and with the bytes for its seed and length.
func answer(writer http.ResponseWriter, request *http.Request) {
	body, err := io.ReadAll(request.Body)
	if err != nil {
		http.Error(writer, err.Error(), 400)
		return
	}
	seed, length := number(request.URL.Query().Get("seed")), number(request.URL.Query().Get("length"))
	writer.Header().Set("Sum", fmt.Sprintf("%x", sha256.Sum256(body)))
	back := content(seed, length)
	if seed%2 == 0 {
		// Write in pieces, without a length.
		for len(back) > 0 {
			piece := min(len(back), 3000)
			writer.Write(back[:piece])
			writer.(http.Flusher).Flush()
			back = back[piece:]
		}
		return
	}
	writer.Write(back)
}

func ask(base string, client, requests int, gate string, sums chan<- string) {
	kept := &http.Client{Timeout: patience, Transport: &http.Transport{}}
	single := &http.Client{Timeout: patience, Transport: &http.Transport{DisableKeepAlives: true}}
	for isOver := false; !isOver; {
		_, err := os.Stat(gate)
		isOver = err == nil
		sum := sha256.New()
		for turn := 0; turn < requests; turn++ {
			by := kept
			if turn%40 == 39 {
				by = single
			}
			seed := client*requests + turn
			sent := content(seed, seed*seed%70000)
			length := seed * 7919 % 200000
			response, err := by.Post(fmt.Sprintf("%s/?seed=%d&length=%d", base, seed, length), "text/plain", bytes.NewReader(sent))
			check(err)
			body, err := io.ReadAll(response.Body)
			check(err)
			response.Body.Close()
			if response.Header.Get("Sum") != fmt.Sprintf("%x", sha256.Sum256(sent)) || !bytes.Equal(body, content(seed, length)) {
				check(fmt.Errorf("client %d: other bytes in turn %d", client, turn))
			}
			sum.Write(body)
		}
		if isOver {
			sums <- fmt.Sprintf("%d %x", client, sum.Sum(nil))
		}
	}
	kept.CloseIdleConnections()
}

func main() {
	debug.SetGCPercent(1)
	go func() {
		for {
			// A loop without calls is preempted by a signal.
			for spins := 0; spins < 1000000; spins++ {
			}
			runtime.GC()
			time.Sleep(time.Millisecond)
		}
	}()
	address := "127.0.0.1:" + os.Args[2]
	if os.Args[1] == "serve" {
		check(http.ListenAndServe(address, http.HandlerFunc(answer)))
	}
	clients, requests := number(os.Args[3]), number(os.Args[4])
	sums := make(chan string)
	for client := 0; client < clients; client++ {
		go ask("http://"+address, client, requests, os.Args[5], sums)
	}
	var all []string
	for len(all) < clients {
		all = append(all, <-sums)
	}
	sort.Strings(all)
	fmt.Println(all)
}
